"""Manifest, model card and hashes of a merged model: how it was made, and whether it is still that."""
