"""A package, as the wheel of verl 0.8 has one of this name, which would be found in its place."""
