"""The parallel runtime under large PyTorch models: typed layouts, explicit contexts, no globals."""
