"""The services the demos run, as users would write them: public API only, each file runs by itself."""
