"""The bundled plugins: one class in one file each."""
