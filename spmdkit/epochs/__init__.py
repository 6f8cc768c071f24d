"""Epochs: a job that loses or wins processes goes on in the same processes, with the state from their memory."""
