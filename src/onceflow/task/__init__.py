"""The code of a batch that runs in tasks: it writes rows, runs process steps, and reports to the driver."""
