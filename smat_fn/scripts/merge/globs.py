"""Coefficients by glob on the command line. No torch in here."""


def by_glob(words: list[str]) -> list[str]:
    """Every ``--coef GLOB=NUMBER`` as words of --coefs."""
    left, rules, rest = list[str](), list[str](), iter(words)
    for word in rest:
        option, _, value = word.partition("=")
        given = [option, value] if value else [word, *([next(rest, "")] if word == "--coef" else [])]
        if given[0] == "--coef" and "=" in given[-1]:
            rules += given[-1].rpartition("=")[::2]
        else:
            left += [word] if value else given
    if not rules:
        return words
    place = left.index("--coefs") if "--coefs" in left else len(left)
    return [*left[:place], "--coefs", *rules, *left[place + 1 :]]
