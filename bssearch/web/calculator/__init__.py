"""The calculator, from a query string to plans."""
