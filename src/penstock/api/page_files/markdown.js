// Markdown of an answer as elements. Text is only ever text: no HTML of an answer becomes an element.
"use strict";

const INLINE = /`([^`\n]+)`|\*\*([^\n]+?)\*\*|(?<![\w*])[*_]([^\s*_](?:[^*_\n]*[^\s*_])?)[*_](?![\w*])|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/;

function element(tag, parts) {
  const made = document.createElement(tag);
  made.append(...parts);
  return made;
}

// The parts of one line: text, code, strong, em, links.
function inline(text) {
  const parts = [];
  for (let found; (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    const [, code, strong, em, label, href] = found;
    parts.push(text.slice(0, found.index));
    if (code !== undefined) parts.push(element("code", [code]));
    else if (strong !== undefined) parts.push(element("strong", inline(strong)));
    else if (em !== undefined) parts.push(element("em", inline(em)));
    else parts.push(Object.assign(element("a", [label]), { href, target: "_blank", rel: "noopener noreferrer" }));
  }
  return [...parts, text];
}

const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());

function table(lines) {
  const row = (line, tag) => element("tr", cells(line).map(cell => element(tag, inline(cell))));
  return element("table", [element("thead", [row(lines[0], "th")]),
    element("tbody", lines.slice(2).map(line => row(line, "td")))]);
}

// Blocks: fences, headings, lists, quotes, tables, rules, paragraphs. A fence that is not closed yet is code.
function markdown(text) {
  const lines = text.split("\n"), blocks = [];
  const take = test => {
    const found = [];
    while (lines.length && test(lines[0])) found.push(lines.shift());
    return found;
  };
  while (lines.length) {
    const line = lines[0], fence = /^\s*```/.exec(line), heading = /^(#{1,6}) +(.*)/.exec(line);
    const bullet = /^\s*[-*+] +/, number = /^\s*\d+[.)] +/, quote = /^> ?/;
    const list = [["ul", bullet], ["ol", number]].find(([, mark]) => mark.test(line));
    if (!line.trim()) lines.shift();
    else if (fence) {
      lines.shift();
      const code = take(l => !/^\s*```\s*$/.test(l));
      lines.shift();
      blocks.push(element("pre", [element("code", [code.join("\n")])]));
    } else if (heading) {
      lines.shift();
      blocks.push(element(`h${Math.min(6, heading[1].length + 2)}`, inline(heading[2])));
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      lines.shift();
      blocks.push(element("hr", []));
    } else if (list) {
      const items = [];
      for (const l of take(l => list[1].test(l) || (/^\s+\S/.test(l) && !/^\s*```/.test(l))))
        if (list[1].test(l)) items.push([l.replace(list[1], "")]);
        else items.at(-1).push(l.trim());
      const made = element(list[0], items.map(item => element("li", inline(item.join(" ")))));
      if (list[0] === "ol") made.start = Number.parseInt(line, 10);
      blocks.push(made);
    } else if (quote.test(line)) {
      blocks.push(element("blockquote", markdown(take(l => quote.test(l)).map(l => l.replace(quote, "")).join("\n"))));
    } else if (line.includes("|") && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[1] || "")) {
      blocks.push(table(take(l => l.includes("|"))));
    } else {
      const paragraph = [lines.shift(), ...take(l => l.trim() && !/^\s*(```|#{1,6} |[-*+] |\d+[.)] |> ?)/.test(l))];
      blocks.push(element("p", paragraph.flatMap((l, n) => n ? ["\n", ...inline(l)] : inline(l))));
    }
  }
  return blocks;
}
