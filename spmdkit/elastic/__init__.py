"""Epochs: a job that loses or wins processes goes on in the same processes, with the state from their memory."""

from spmdkit.elastic.membership import Epochs, ending, epochs_of

__all__ = ["Epochs", "ending", "epochs_of"]
