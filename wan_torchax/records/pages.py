"""HTML from wan_torchax/templates: whatever a prompt or a folder's name holds is shown as text."""
from jinja2 import Environment, PackageLoader, StrictUndefined

lines = dict(trim_blocks=True, lstrip_blocks=True)  # those of tags leave none in the page
environment = Environment(loader=PackageLoader("wan_torchax"), autoescape=True, undefined=StrictUndefined, **lines)


def render(template: str, **values) -> str:
    return environment.get_template(template).render(**values)
