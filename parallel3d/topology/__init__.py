"""Where ranks sit and which groups they form."""
