"""The state API for user code: processors, their state, maps, lists, timers and serdes."""
