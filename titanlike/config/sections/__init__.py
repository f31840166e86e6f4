"""The sections of a config, a class each. A field's docstring is its help text and names its unit."""
