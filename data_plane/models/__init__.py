"""Model families: what a family needs to know (`spec`), and the forward pass of each."""
