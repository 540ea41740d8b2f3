"""Templates that fill the memory or never end are refused soon and cheaply."""

import resource
import time

import pytest
from forks import FORKS
from jinja2 import TemplateError

from plugsft.data import jinja_limits
from plugsft.data.chat import TEMPLATE_ERRORS
from plugsft.data.jinja import compile_template, render

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
TWICE = "{% set ns = namespace(x=['ab'], n=0) %}{% for i in range(60) %}"
FOREVER = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that print": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}"
    "{% endfor %}",
    "filtered loops": "{% macro f(a) %}{% for b in range(9999) %}{% endfor %}{% endmacro %}"
    "{% for a in range(99999) if f(a) == 'x' %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
    "a recursive loop": "{% for a in [[0, 1, 2]] recursive %}{{ loop([a, a]) if loop.depth < 60 }}"
    "{% endfor %}",
    "calls": "{% macro f(n) %}{% for i in range(999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call f(1) %}{% for i in range(9999) %}{% set x = i %}{% endfor %}{% endcall %}" * 9,
}
LARGE = {
    "times": "{{ 'x' * 10**9 }}",
    "times, turned": "{{ 10**9 * messages[0].content }}",
    "a list, times": "{{ ([1] * 10**9)|length }}",
    "a list of lists": "{{ ([['x' * 10**6] * 10**6] * 10**6)|string }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "products": "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "format": "{{ '%1000000000d' % 1 }}",
    "format with a star": "{{ '%*d' % (1000000000, 1) }}",
    "the filter format": "{{ '%1000000000d'|format(1) }}",
    "the method format": "{{ '{:1000000000}'.format(1) }}",
    "the method format, nested": "{{ '{:{}}'.format('a', 1000000000) }}",
    "the method format, as a value": "{% set f = '{:1000000000}'.format %}{{ f(1) }}",
    "center": "{{ 'x'.center(1000000000) }}",
    "the filter center": "{{ 'x'|center(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "ljust by map": "{{ ['x']|map('center', 1000000000)|list }}",
    "expandtabs": "{{ ('\t' * 900000).expandtabs(900000) }}",
    "replace": "{{ ('x' * 900000).replace('x', 'y' * 900000) }}",
    "the filter replace": "{{ ('x' * 900000)|replace('x', 'y' * 900000) }}",
    "join": "{{ ('y' * 900000).join(['x'] * 900000) }}",
    "the filter join": "{{ (['x' * 900000] * 900000)|join }}",
    "the filter join, a long comma": "{{ (['x'] * 900000)|join('y' * 900000) }}",
    "indent": "{{ ('x\n' * 400000)|indent(900000) }}",
    "indent by a text": "{{ ('x\n' * 400000)|indent('y' * 900000) }}",
    "wordwrap": "{{ ('x ' * 400000)|wordwrap(1, wrapstring='y' * 900000) }}",
    "tojson": "{{ messages|tojson(indent=1000000000) }}",
    "tojson of much": "{{ (['x' * 900000] * 900000)|tojson }}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "strftime": "{{ strftime_now('%1000000000Y') }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "printed in a loop": "{% for i in range(99999) %}" + "x" * 99_999 + "{% endfor %}",
    "a set block": "{% set x %}{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"
    "{% endset %}",
    "joined in a loop": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "joined lists": TWICE + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "nested lists": TWICE + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested lists as JSON": TWICE + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "nested lists, joined": TWICE + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ 'a' ~ ns.x }}",
    "nested lists as text": TWICE + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|string }}",
    "nested lists, formatted": TWICE + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ '%s' % ns.x }}",
    "added in a loop": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "added line by line": "{% set x = 'ab' %}" + "{% set x = x + x %}" * 60 + "{{ x|length }}",
    "added by a macro": "{% macro f(x, n) %}{{ f(x + x, n - 1) if n }}{% endmacro %}"
    "{{ f('ab', 60) }}",
    "added in lists": "{% macro f(x, n) %}{{ f([x[0] + x[0]], n - 1) if n }}{% endmacro %}"
    "{{ f(['ab'], 60) }}",
}


def refuse(cases):
    """Render each; in a process of its own, so that its memory is only its own."""
    for name, source in cases.items():
        jinja_limits.MAX_SECONDS = 0.5
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
        try:
            made = render(compile_template(source), MESSAGES, {"tools": None})[0]
            raise AssertionError(f"{name}: {len(made):,} characters")
        except (TemplateError, *TEMPLATE_ERRORS):
            pass
        taken = time.thread_time() - started
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert taken < 3 and grown < 400, (name, taken, grown)


@pytest.mark.parametrize("cases", [FOREVER, LARGE], ids=["forever", "large"])
def test_a_template_that_would_not_end_or_fill_the_memory_is_refused(cases):
    process = FORKS.Process(target=refuse, args=(cases,))
    process.start()
    process.join(120)
    alive = process.is_alive()
    process.kill()
    assert not alive and process.exitcode == 0


def test_a_long_row_may_have_a_long_text():
    content = "word " * 1_000_000
    template = compile_template(
        "{% for m in messages %}{{ '<' + m.content + '>' }}{{ m.content }}{% endfor %}"
    )
    text = render(template, [{"role": "user", "content": content}], {})[0]
    assert text == f"<{content}>{content}"
    many = [{"role": "user", "content": "a"}] * 100_000
    written = render(
        compile_template("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"), many, {}
    )
    assert written[0] == "<|im_start|>a" * 100_000


@pytest.mark.parametrize(
    "source, text",
    [
        ("{{ 'a' + 'b' ~ 3 ~ none ~ [1] }}", "ab3None[1]"),
        ("{{ '%s-%5.2f|' % ('x', 2) }}{{ '{:>4}'.format(7) }}", "x- 2.00|   7"),
        (
            "{{ 1700000000 * 1000 }}{{ 1700000000|string }}{{ 2 ** 40 }}",
            "17000000000001700000000" + str(2**40),
        ),
        ("{{ [1, 2] + [3] }}{{ 'ab' * 3 }}{{ ['a', 'b']|join(', ') }}", "[1, 2, 3]abababa, b"),
        ("{{ {'a': [1]}|tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        (
            "{% set x = 'a' + 'b' %}{{ x|upper|center(6) }}|{{ 'a-b'|replace('-', '+') }}",
            "  AB  |a+b",
        ),
        ("{{ 'a b'.split()|join('-') }}{{ 'x'.center(3) }}{{ ' x '.strip() }}", "a-b x x"),
        ("{% macro f(a, b=1) %}{{ a + b }}{% endmacro %}{{ f(1) }}{{ f(1, 2) }}", "23"),
        ("{{ undefined_name }}{{ none }}{{ true }}{{ 1.5 }}", "NoneTrue1.5"),
    ],
)
def test_what_is_bounded_is_written_as_ever(source, text):
    assert render(compile_template(source), MESSAGES, {})[0] == text
