"""Tables of other flows and programs that a flow joins with: each batch sees them at offsets that are fixed for it."""
