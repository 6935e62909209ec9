"""The methods; each opens with its config and its audit. Methods never import each other."""
