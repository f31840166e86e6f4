"""Models in the Hub's form: config.json and safetensors files, in and out."""
