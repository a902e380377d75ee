import not_there


def score(**columns):
    return not_there.score(**columns)
