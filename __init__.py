"""What ComfyUI imports when the whole project is cloned into its custom_nodes folder. Nothing else does."""
if __name__ == "wan_torchax":  # pytest would take this folder for the package in it
    raise ImportError("the project's folder cannot be called wan_torchax itself; rename it, e.g. to wan-torchax")

if __package__:  # for pytest, this is a module of no package where a folder's name is no identifier, as wan-torchax
    from .comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    __all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
