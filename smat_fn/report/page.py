"""One HTML file from Markdown: styles inline, images as data URIs, no scripts."""

import base64
import html
from collections.abc import Mapping

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --back: #fff; --lift: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa4ae; --line: #39424b; --back: #14181c; --lift: #1c2228; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--back); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word;
}
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-top: 1px solid var(--line); padding-top: 1rem; }
#summary { border: 0; padding-top: 0; margin-top: 1rem; }
#summary + ul { background: var(--lift); border-radius: .5rem; padding: .8rem 1rem .8rem 2rem; }
li { margin: .3rem 0; }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .9rem; }
a { color: inherit; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.long { white-space: normal; min-width: 14rem; }
th { color: var(--soft); text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--back); }
img { display: block; max-width: 100%; height: auto; margin: 1rem 0; background: #fff; border-radius: .3rem; }
code { font-size: .85em; background: var(--lift); padding: .1em .3em; border-radius: .2em; }
@media print { nav { display: none; } .table { overflow: visible; } }
"""


def page(title: str, text: str, images: Mapping[str, bytes]) -> str:
    """A page that needs no other file.

    Args: text: what follows the title, in Markdown (CommonMark and tables; HTML in it is shown, not obeyed); images:
        PNGs by the name that the text gives them.
    """
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = reader.parse(text)
    links = []
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and token.tag == "h2" and following is not None:
            anchor = _anchor(following.content)
            token.attrSet("id", anchor)
            links.append(f'<a href="#{anchor}">{html.escape(following.content)}</a>')
        if token.type == "td_open" and following is not None and len(following.content) > 60:
            token.attrSet("class", "long")
        for child in token.children or ():
            if child.type == "image":
                child.attrSet("src", _uri(images[str(child.attrGet("src"))]))
    body = reader.renderer.render(tokens, reader.options, {})
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<nav>{' '.join(links)}</nav>\n{body}</body>\n</html>\n"
    )


def _anchor(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")


def _uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
