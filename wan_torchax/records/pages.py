"""Renders HTML from wan_torchax/templates, with autoescaping."""
from jinja2 import Environment, PackageLoader, StrictUndefined

lines = dict(trim_blocks=True, lstrip_blocks=True)  # lines with only a tag leave no blank line
environment = Environment(loader=PackageLoader("wan_torchax"), autoescape=True, undefined=StrictUndefined, **lines)


def render(template: str, **values) -> str:
    return environment.get_template(template).render(**values)
