"""The fixtures come from onceflow.testing.plugin, which pytest loads by its entry point."""
