"""The colours of all pages, for light and dark themes, safe for colour-blind readers.

The eight colours of Okabe and Ito, lightened for dark pages. A figure refers to a colour by name, "@blue", or with an
opacity, "@blue/0.2"; the page inserts the colour of its theme, and an exported figure that of the light theme.

Read next: style.css, where the names are CSS variables.
"""

LIGHT = {
    "paper": "#ffffff",
    "raised": "#f6f6f3",
    "ink": "#1b1d21",
    "soft": "#5a5f68",
    "rule": "#dcdcd6",
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "purple": "#b8588f",
    "orange": "#c98a00",
    "sky": "#3b9bd3",
    "yellow": "#b3a500",
    "grey": "#767b84",
    "link": "#005a8f",
}
DARK = {
    "paper": "#15171b",
    "raised": "#1e2126",
    "ink": "#e8e8e4",
    "soft": "#a4a9b2",
    "rule": "#363a42",
    "blue": "#4fa8e0",
    "vermilion": "#f2834a",
    "green": "#35c49b",
    "purple": "#e096c0",
    "orange": "#f0b23c",
    "sky": "#8fd0f5",
    "yellow": "#f0e55e",
    "grey": "#8f959f",
    "link": "#8fc7f0",
}

# The colour of each status of a statement, on every page.
STATUSES = {"agrees": "green", "departs": "vermilion", "inconclusive": "orange", "silent": "grey"}

TONES = ("blue", "vermilion", "green", "purple", "orange", "sky", "yellow")
