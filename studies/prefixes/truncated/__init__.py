"""The same sums with importance ratios cut at a limit, as `correction: truncated` cuts them."""
