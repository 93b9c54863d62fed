"""What user code sees of state: processors, their state, maps, lists, timers and serdes."""
