"""The page a training run ends with."""
