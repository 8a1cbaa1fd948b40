"""Parts that mergers are made of: base class, inputs, weights by expert, matrices, loops. None of them is a merger."""
