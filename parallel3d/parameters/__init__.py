"""What a local parameter is a piece of, how pieces lie flat, and the whole of them."""
