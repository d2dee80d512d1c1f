"""Examples that train real models on real data, on a laptop's CPU or on a GPU."""
