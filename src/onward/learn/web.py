"""A chapter as one HTML page that needs no other file."""

import re
from html import escape

from markdown_it import MarkdownIt

from onward.learn.chapters import Chapter
from onward.learn.interactive.figure import InteractiveFigure, script, style, with_figures

STYLE = """
:root { color-scheme: light dark }
body { margin: 0 auto; max-width: 46rem; padding: 2rem 1.25rem 4rem; font: 17px/1.6 system-ui, sans-serif;
  overflow-wrap: break-word; background: light-dark(#fff, #121212) }
pre { overflow-x: auto; padding: .8rem 1rem; border-radius: 8px; background: light-dark(#f4f4f6, #22242a);
  font-size: .85rem; line-height: 1.5 }
code { font-family: ui-monospace, monospace } p code, td code { font-size: .9em }
img { max-width: 100% } table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { border-bottom: 1px solid light-dark(#ccc, #555); padding: .3rem .7rem; text-align: left; vertical-align: top }
details { margin: .6rem 0 1rem; padding-left: 1rem; border-left: 3px solid light-dark(#bbb, #666) }
summary { cursor: pointer } a { color: light-dark(#2546b8, #9db4ff) }
"""


def web_page(chapter: Chapter) -> str:
    text = with_figures(chapter, chapter.alone, InteractiveFigure.html)
    body = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    body = re.sub(r'src="([\w-]+\.svg)"', lambda match: f'src="{chapter.picture(match[1])}"', body)
    body = body.replace("<pre>", '<pre tabindex="0">')  # long lines are scrolled with the keyboard, too
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(chapter.title)} · Onward</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{STYLE}{style()}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n<script>\n{script()}</script>\n</body>\n</html>\n"
    )
