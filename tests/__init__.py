"""Known as `tests` also where pytest says <folder>.tests, since the project's folder has an __init__.py for ComfyUI."""
import sys

sys.modules["tests"] = sys.modules[__name__]
