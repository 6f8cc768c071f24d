"""What is computed in one step: records a trace may ask, means, the gradient and its forms, the train state, what
leaves."""
