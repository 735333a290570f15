"""What the native engine runs on the device at every token. Only this folder imports triton for generation."""
