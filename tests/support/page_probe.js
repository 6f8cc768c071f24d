// Runs in a copy of a page: reports what a reader would see wrong. tests/support/browser.py adds it.
const problems = [], add = (kind, ...parts) => problems.push([kind, ...parts].join(" "));
const box = e => e.getBoundingClientRect(), style = e => getComputedStyle(e);
const name = e => e.tagName + (e.getAttribute("class") ? "." + e.getAttribute("class") : "");
const inside = (a, b, slack) => a.left >= b.left - slack && a.right <= b.right + slack
  && a.top >= b.top - slack && a.bottom <= b.bottom + slack;
const meet = (a, b, s) => a.left + s < b.right && b.left + s < a.right && a.top + s < b.bottom && b.top + s < a.bottom;
const color = text => text.match(/[\d.]+/g).map(Number);
const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
const solid = c => c.length === 3 || c[3] === 1;

function background(element, rect) {
  const svg = element.closest("svg"), x = (rect.left + rect.right) / 2, y = (rect.top + rect.bottom) / 2;
  const under = svg ? [...svg.querySelectorAll("rect")].filter(r => r.compareDocumentPosition(element) & 4
    && box(r).left < x && x < box(r).right && box(r).top < y && y < box(r).bottom) : [];
  if (under.length) return color(style(under.at(-1)).fill);
  for (let e = svg || element; e; e = e.parentElement) {
    const found = color(style(e).backgroundColor);
    if (solid(found)) return found;
  }
}

function texts() {
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT), found = [];
  for (let node; node = walker.nextNode();) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest("title")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const svg = parent.closest("svg"), scroll = parent.closest(".scroll");
    for (const r of svg ? [box(parent)] : range.getClientRects()) {
      if (r.width < 1 || scroll && !inside(r, box(scroll), 0)) continue;
      const trim = svg ? 0 : r.height * .2;
      found.push({parent, text: node.textContent.trim().slice(0, 40), scroll, svg,
        rect: {left: r.left, right: r.right, top: r.top + trim, bottom: r.bottom - trim}});
    }
  }
  return found;
}

const all = texts();
if (document.documentElement.scrollWidth > innerWidth) add("the body scrolls", document.documentElement.scrollWidth);
for (const {parent, text, rect, svg} of all) {
  let block = parent;
  while (!svg && style(block).display === "inline") block = block.parentElement;
  if (!inside(rect, box(svg || block), 1)) add("cut off:", text);
  const ratio = contrast(color(svg ? style(parent).fill : style(parent).color), background(parent, rect));
  if (!(ratio >= 4.5)) add("contrast", ratio.toFixed(2), text);
  if (svg) {
    const size = parseFloat(style(parent).fontSize) * box(svg).width / svg.viewBox.baseVal.width;
    if (size < 7.5) add("small text", size.toFixed(1), text);
  }
}
all.sort((a, b) => a.rect.top - b.rect.top);
all.forEach((a, i) => {
  for (let k = i + 1; k < all.length && all[k].rect.top < a.rect.bottom; k++)
    if (meet(a.rect, all[k].rect, 1)) add("overlap:", a.text, "|", all[k].text);
});
for (const e of document.querySelectorAll("main *")) {
  if (e.closest("title") || !box(e).width) continue;
  const svg = e.parentElement.closest("svg"), parent = svg || e.parentElement;
  const is_free = e.closest(".scroll") || style(parent).display === "inline";
  if (!is_free && !inside(box(e), box(parent), 2)) add("outside of its parent:", name(e));
  const next = e.nextElementSibling, blocks = [e, next].every(x => x && style(x).display !== "inline" && box(x).width);
  if (!svg && !e.closest("table") && blocks && meet(box(e), box(next), 1)) add("overlap:", name(e), "|", name(next));
}
for (const value of document.querySelectorAll(".facts td"))
  if (box(value).width < .5 * box(value.closest("table")).width) add("narrow value:", value.textContent.slice(0, 30));
for (const grid of document.querySelectorAll(".cards")) {
  const rows = Object.groupBy([...grid.children].map(box), r => Math.round(r.top));
  for (const row of Object.values(rows)) {
    const gaps = 12 * (row.length - 1), filled = row.reduce((sum, r) => sum + r.width, gaps);
    if (Math.abs(filled - box(grid).width) > 2) add("a row of tiles is not filled:", row.length);
  }
}
const picked = [...new Set(problems)];
parent.postMessage([name_of_page, innerWidth, picked.slice(0, 6), all.length], "*");
