"""What is fast here: measured, tabulated, and chosen from."""
