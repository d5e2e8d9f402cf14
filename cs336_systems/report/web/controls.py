"""HTML in both languages, and the selects of a page that choose its language and theme; controls.js is their script."""

from html import escape

from cs336_systems.text import LANGUAGES, Language, Text

_LANGUAGE = Text("Language", "语言")
_THEME = Text("Theme", "主题")
_THEMES = {
    "system": Text("Theme: system", "主题：跟随系统"),
    "light": Text("Theme: light", "主题：浅色"),
    "dark": Text("Theme: dark", "主题：深色"),
}


def html_text(text: str | Text) -> str:
    """Return escaped HTML. If the languages differ it holds both, and the page shows one."""
    if isinstance(text, str):
        return escape(text)
    if text.in_("zh") == text.en:
        return escape(text.en)
    return f'<span class="en">{escape(text.en)}</span><span class="zh" lang="zh-CN">{escape(text.zh)}</span>'


def attributes(prefix: str, text: Text) -> str:
    """Return one attribute for each language."""
    return "".join(f' {prefix}{language}="{escape(text.in_(language))}"' for language in LANGUAGES)


def aria_label(name: Text, language: Language) -> str:
    label = f' aria-label="{escape(name.in_(language))}"'
    return label + (attributes("data-aria-", name) if name.in_("zh") != name.en else "")


def html_attributes(language: Language) -> str:
    """Return the attributes of the html element of a page that opens in this language."""
    return f'lang="{"zh-CN" if language == "zh" else "en"}" data-language="{language}"'


def controls(language: Language) -> str:
    """Return the two selects; a page without scripts hides them."""
    themes = "".join(
        f'<option value="{value}"{attributes("data-", name)}>{escape(name.in_(language))}</option>'
        for value, name in _THEMES.items()
    )
    languages = '<option value="en">English</option><option value="zh">中文</option>'
    return (
        f'<div class="controls"><select id="language"{aria_label(_LANGUAGE, language)}>{languages}</select>'
        f'<select id="theme"{aria_label(_THEME, language)}>{themes}</select></div>'
    )
