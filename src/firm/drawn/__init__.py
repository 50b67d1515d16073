"""The built-in products: parts that are drawn, with their defects."""
