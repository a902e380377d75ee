"""Two environments in one run, chosen row by row: a counter and a desk with a calculator."""
