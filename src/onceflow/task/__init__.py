"""The code of a batch that runs in tasks: it writes rows, runs state steps, and reports to the driver."""
