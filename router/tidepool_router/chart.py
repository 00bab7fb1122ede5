# SPDX-License-Identifier: Apache-2.0
"""Charts of the simulation's results."""
from .experiment import interval

COLOURS = {'requests': '#d1495b', 'used-tokens': '#edae49', 'conversations': '#00798c', 'tokens': '#30638e'}
LABELS = {'requests': 'requests in flight', 'used-tokens': 'tokens in flight', 'conversations': 'open conversations',
          'tokens': 'tokens of open conversations'}
FLOOR = 1e-5


def curves(results, per_node, title, path):
    """results: {load: {conversations per node: figures of the seeds}}"""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharex=True)
    for axis, name, label in ((axes[0], 'moves_per_turn', 'moves a later turn'),
                              (axes[1], 'added_prefill', 'prefill added by moves')):
        for load, points in results.items():
            known = [c for c in per_node if c in points]
            middle = [interval([f[name] for f in points[c]]) for c in known]
            mean = [max(m, FLOOR) for m, _ in middle]
            low = [max(m - h, FLOOR) for m, h in middle]
            high = [max(m + h, FLOOR) for m, h in middle]
            axis.plot(known, mean, marker='o', markersize=4, color=COLOURS[load], label=LABELS[load])
            axis.fill_between(known, low, high, color=COLOURS[load], alpha=.2, linewidth=0)
        axis.set_xscale('log', base=2)
        axis.set_yscale('log')
        axis.set_ylim(FLOOR * .8, 2)
        axis.set_xticks(per_node)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f'{v:g}'))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: 'none seen' if v <= FLOOR * 1.01 else f'{v:.3%}'.rstrip('0').rstrip('.%') + '%'
                                                     if v < .01 else f'{v:.0%}'))
        axis.set_xlabel('live conversations a node')
        axis.set_ylabel(label)
        axis.grid(True, which='major', alpha=.3)
    axes[1].axhline(.001, color='black', linewidth=.8, linestyle='--')
    axes[1].text(per_node[-1], .00108, '0.1%', ha='right', va='bottom', fontsize=8)
    figure.suptitle(title, fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, ['load: ' + label for label in labels], loc='lower center', ncol=4, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, .05, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def comparison(rows, title, path):
    """rows: [(policy, figures of the seeds)]"""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True)
    names = [name for name, _ in rows]
    for axis, name, label, form in ((axes[0], 'hit_rate', 'prefix hit rate', '{:.0%}'),
                                    (axes[1], 'spread_live', 'most live conversations / average', '{:.2f}'),
                                    (axes[2], 'ttft_p95_s', 'time to first token, p95 (s)', '{:.1f}')):
        values = [interval([f[name] for f in figures]) for _, figures in rows]
        bars = axis.barh(names, [m for m, _ in values], xerr=[h for _, h in values],
                         color=['#00798c' if n == 'threshold' else '#b0b7bf' for n in names])
        axis.bar_label(bars, labels=[form.format(m) for m, _ in values], padding=4, fontsize=8)
        axis.set_xlabel(label, fontsize=9)
        axis.margins(x=.18)
        axis.invert_yaxis() if axis is axes[0] else None
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
