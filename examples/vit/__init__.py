"""A small vision transformer on scikit-learn's handwritten digits."""
