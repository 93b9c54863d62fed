"""The driver's side of a flow: start-up, and the numbered steps of a batch."""
