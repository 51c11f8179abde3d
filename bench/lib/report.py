def markdown(results):
    return "\n".join(map(str,[*results.rows(), *results.ratios()]))
