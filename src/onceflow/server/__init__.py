"""The query server: tables over HTTP, shared by several instances."""
