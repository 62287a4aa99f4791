/* Draws one chart of the page into its box, as SVG: curves and dots, violins, or a heat map.

   spec.x, spec.y   title; ticks [[value, text], ...]; log; zero (0 in sight); range
   spec.lines       name, x, y, look (color, dash, symbol), dots (no line), labels of the dots
   spec.levels      heights of thin lines across
   spec.bands       [from, to] on the x axis, shaded
   spec.bars        lines as bars side by side
   spec.violins     half (width on the x axis), items [place, name, values, half-widths in %, mode, median, mean]
   spec.heat        columns, rows, x0, dx, y0, dy, low, top, values (base64, 16 bit), names of x and y, square */
var DepthChart = (function () {
  "use strict";
  var INK = "var(--ink)", SOFT = "var(--soft)", GRID = "var(--grid)", BLUE = "var(--violin)";
  var DASHES = { solid: "", dash: "8 5", dot: "2 4", dashdot: "9 4 2 4", longdash: "14 4 3 4 3 4" };
  // the scale cividis: its lightness grows evenly, and reads the same for the colour-blind and in grey
  var CIVIDIS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120],
    [166, 157, 117], [196, 181, 108], [228, 207, 91], [254, 232, 56]];
  var MARKS = [
    { name: "mode", look: { color: INK, symbol: "diamond", open: true } },
    { name: "mean", look: { color: "#D55E00", symbol: "circle" } },
    { name: "median", look: { color: INK, symbol: "dash" } },
  ];
  var SHAPE = { name: "distribution", look: { color: BLUE, symbol: "violin" } };
  var charts = 0;
  var tip = null, spot = null; // the one read-out of the page, and [chart, x, y] that it belongs to

  function svg(name, attributes, parent) {
    var made = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.keys(attributes).forEach(function (key) { made.setAttribute(key, attributes[key]); });
    if (parent) parent.appendChild(made);
    return made;
  }
  function html(name, className, parent, text) {
    var made = document.createElement(name);
    made.className = className;
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  }
  function write(parent, x, y, text, how) {
    svg("text", Object.assign({ x: x, y: y, fill: SOFT, "font-size": 11 }, how), parent).textContent = text;
  }
  function number(v) {
    if (v === 0) return "0";
    var size = Math.abs(v), gap = 1 - v;
    if (gap > 0 && gap < 5e-5) return "1 - " + number(Number(gap.toPrecision(2)));
    return size >= 1e-3 && size < 1e5 ? String(Number(v.toPrecision(5))) : String(Number(v.toExponential(3)));
  }
  function tint(color) { return color === "#000000" ? INK : color === "#0072B2" ? BLUE : color; }
  function known(v) { return v !== null && v !== undefined; }

  // "M x y ..." of a mark of radius r
  function symbol(kind, x, y, r) {
    function poly(points) {
      return "M" + points.map(function (p) { return (x + r * p[0]).toFixed(1) + " " + (y + r * p[1]).toFixed(1); }).join("L") + "Z";
    }
    switch (kind) {
      case "square": return poly([[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]]);
      case "triangle-up": return poly([[0, -1.2], [1.1, 0.8], [-1.1, 0.8]]);
      case "triangle-down": return poly([[0, 1.2], [1.1, -0.8], [-1.1, -0.8]]);
      case "diamond": return poly([[0, -1.3], [1.1, 0], [0, 1.3], [-1.1, 0]]);
      case "violin": return poly([[0, -1.8], [1.3, 0], [0, 1.8], [-1.3, 0]]);
      case "dash": return "M" + (x - 2 * r).toFixed(1) + " " + y.toFixed(1) + "h" + (4 * r).toFixed(1);
    }
    return "M" + (x - r).toFixed(1) + " " + y.toFixed(1) + "a" + r + " " + r + " 0 1 0 " + 2 * r + " 0a" + r + " " + r + " 0 1 0 " + -2 * r + " 0Z";
  }
  function mark(parent, look, x, y, r) {
    return svg("path", {
      "class": "mark", d: symbol(look.symbol, x, y, r), stroke: tint(look.color), "stroke-width": look.symbol === "dash" ? 2 : 1,
      fill: look.symbol === "violin" ? "rgba(0,114,178,0.28)" : look.open ? "var(--paper)" : tint(look.color),
      "fill-opacity": look.open ? 0.6 : 1,
    }, parent);
  }

  function nice(span, most, whole) {
    var raw = Math.max(span / Math.max(1, most), 1e-300);
    var base = Math.pow(10, Math.floor(Math.log10(raw)));
    var step = [1, 2, 5, 10].find(function (k) { return k * base >= raw * 0.999; }) * base;
    return whole ? Math.max(1, step) : step;
  }
  function even(low, high, most, whole) {
    var step = nice(high - low, most, whole), found = [];
    for (var k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) {
      var v = Number((k * step).toPrecision(10));
      found.push([v, Math.abs(v) >= 1e5 || (v && Math.abs(v) < 1e-4) ? v.toExponential() : String(v)]);
    }
    return found;
  }
  function power(k) {
    return "10" + String(k).replace(/./g, function (c) { return "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]; });
  }
  function decades(low, high, most) {
    var a = Math.log10(low), b = Math.log10(high), found = [];
    if (b - a < 1) return even(low, high, most, false).filter(function (tick) { return tick[0] > 0; });
    var step = Math.max(1, Math.ceil((b - a) / most));
    for (var k = Math.floor(a); k <= b; k++) {
      (b - a < 3 ? [1, 2, 5] : [1]).forEach(function (m) {
        var v = m * Math.pow(10, k);
        if (v >= low * 0.999 && v <= high * 1.001 && k % step === 0) found.push([v, b - a < 3 && k > -4 && k < 5 ? String(Number(v.toPrecision(3))) : (m > 1 ? m + "·" : "") + power(k)]);
      });
    }
    return found;
  }

  function Chart(box, spec, label) {
    var chart = this;
    this.box = box;
    this.spec = spec;
    this.off = {}; // names of what the reader has switched off
    this.view = null; // [x0, x1, y0, y1] when zoomed
    this.hover = null; // number of what is read out
    this.id = "clip-" + charts++;
    if (spec.heat) this.values = decode(spec.heat.values);
    this.parts = spec.violins ? [SHAPE].concat(MARKS) : spec.lines || [];
    this.legend = html("div", "legend", box);
    this.plot = html("div", "plot", box);
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "img");
    this.plot.setAttribute("aria-label", label + ". Arrow keys read out the numbers.");
    if (this.parts.length > 1) this.parts.forEach(function (part) { chart.key(part); });
    this.back = html("button", "back", this.legend, "whole chart");
    this.back.type = "button";
    this.back.hidden = true;
    this.back.addEventListener("click", function () { chart.zoom(null); });
    this.listen();
    this.draw();
  }

  function decode(text) {
    var bytes = atob(text), found = new Uint16Array(bytes.length / 2);
    for (var i = 0; i < found.length; i++) found[i] = bytes.charCodeAt(2 * i) + 256 * bytes.charCodeAt(2 * i + 1);
    return found;
  }

  // a key of the legend, which switches its part off and on
  Chart.prototype.key = function (part) {
    var chart = this, button = html("button", "key", this.legend);
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    sample(button, part);
    html("span", "", button, part.name);
    button.addEventListener("click", function () {
      chart.off[part.name] = !chart.off[part.name];
      button.setAttribute("aria-pressed", String(!chart.off[part.name]));
      chart.draw();
    });
  };
  function sample(parent, part) {
    var look = part.look, small = svg("svg", { width: 30, height: 12, "aria-hidden": "true" }, parent);
    if (look.dash !== undefined && !part.dots) svg("path", { d: "M1 6H29", stroke: tint(look.color), "stroke-width": 2, "stroke-dasharray": DASHES[look.dash] }, small);
    mark(small, look, 15, 6, look.symbol === "violin" ? 3 : 3.5);
  }

  Chart.prototype.shown = function () {
    var off = this.off;
    return this.parts.filter(function (part) { return !off[part.name]; });
  };

  // [x0, x1, y0, y1] that hold everything in sight
  Chart.prototype.extent = function () {
    var spec = this.spec, log = spec.y.log, xs = [], ys = [];
    if (spec.heat) {
      var h = spec.heat;
      return [h.x0 - h.dx / 2, h.x0 + h.dx * (h.columns - 0.5), h.y0 - h.dy / 2, h.y0 + h.dy * (h.rows - 0.5)];
    }
    if (spec.violins) {
      spec.violins.items.forEach(function (item) {
        xs.push(item[0] - 0.6, item[0] + 0.6);
        ys.push(item[2][0], item[2][item[2].length - 1]);
      });
    } else {
      spec.lines.forEach(function (line) { xs.push(line.x[0], line.x[line.x.length - 1]); });
      this.shown().forEach(function (line) {
        line.y.forEach(function (v) { if (known(v) && (!log || v > 0)) ys.push(v); });
      });
    }
    var x0 = Math.min.apply(null, xs), x1 = Math.max.apply(null, xs), edge = spec.violins ? 0 : Math.max(0.3, 0.015 * (x1 - x0));
    var range = spec.y.range || [Math.min.apply(null, ys), Math.max.apply(null, ys)], y0 = range[0], y1 = range[1];
    if (!ys.length && !spec.y.range) return [x0 - edge, x1 + edge, log ? 0.1 : 0, 1];
    if (!spec.y.range) {
      if (log) {
        var grow = Math.max(Math.pow(y1 / y0, 0.05), 1.02);
        y0 /= grow;
        y1 *= grow;
      } else {
        if (spec.y.zero) { y0 = Math.min(0, y0); y1 = Math.max(0, y1); }
        var pad = 0.05 * (y1 - y0) || 0.05 * Math.abs(y1) || 0.5;
        y0 = spec.y.zero && y0 === 0 ? 0 : y0 - pad;
        y1 += pad;
      }
    }
    return [x0 - edge, x1 + edge, y0, y1];
  };

  // draws everything anew; without a size, into the box as it is
  Chart.prototype.draw = function (width, height) {
    var spec = this.spec, chart = this;
    this.hide();
    this.plot.replaceChildren();
    this.back.hidden = !this.view;
    width = width || this.plot.clientWidth;
    height = height || this.plot.clientHeight;
    var v = this.view || this.extent(), log = spec.y.log, heat = spec.heat;
    var yTicks = log ? decades(v[2], v[3], height / 40) : even(v[2], v[3], height / 48, !!heat);
    var longest = Math.max.apply(null, yTicks.map(function (tick) { return tick[1].length; }).concat(1));
    var area = { left: 34 + 6.2 * longest, top: 8, right: heat ? 66 : 10, bottom: 40 };
    area.width = Math.max(20, width - area.left - area.right);
    area.height = Math.max(20, height - area.top - area.bottom);
    if (heat && heat.square) {
      var side = Math.min(area.width / heat.columns, area.height / heat.rows);
      area.width = side * heat.columns;
      area.height = side * heat.rows;
    }
    function f(y) { return log ? Math.log10(y) : y; }
    this.px = function (x) { return area.left + (x - v[0]) / (v[1] - v[0]) * area.width; };
    this.py = function (y) {
      var share = (f(y) - f(v[2])) / (f(v[3]) - f(v[2]));
      return area.top + (heat && heat.square ? share : 1 - share) * area.height;
    };
    this.xOf = function (px) { return v[0] + (px - area.left) / area.width * (v[1] - v[0]); };
    this.yOf = function (py) {
      var share = (py - area.top) / area.height;
      share = heat && heat.square ? share : 1 - share;
      var at = f(v[2]) + share * (f(v[3]) - f(v[2]));
      return log ? Math.pow(10, at) : at;
    };
    this.area = area;
    var root = svg("svg", { "class": "drawing", width: width, height: height, viewBox: "0 0 " + width + " " + height }, this.plot);
    var clip = svg("clipPath", { id: this.id }, svg("defs", {}, root));
    svg("rect", { x: area.left - 1, y: area.top - 1, width: area.width + 2, height: area.height + 2 }, clip);
    var axes = svg("g", {}, root), bottom = area.top + area.height;
    yTicks.forEach(function (tick) {
      var y = chart.py(tick[0]);
      if (!heat) svg("path", { d: "M" + area.left + " " + y + "h" + area.width, stroke: GRID }, axes);
      write(axes, area.left - 6, y + 4, tick[1], { "text-anchor": "end" });
    });
    var xTicks = spec.x.ticks || even(Math.max(v[0], spec.violins || heat ? v[0] : 0), v[1], area.width / 46, true);
    var free = -1e9; // where the last label ends
    xTicks.forEach(function (tick) {
      var x = chart.px(tick[0]), half = 3.4 * tick[1].length;
      if (tick[0] < v[0] || tick[0] > v[1]) return;
      svg("path", { d: "M" + x + " " + bottom + "v4", stroke: SOFT }, axes);
      if (x - half < free + 4) return;
      write(axes, x, bottom + 16, tick[1], { "text-anchor": "middle" });
      free = x + half;
    });
    svg("path", { d: "M" + area.left + " " + area.top + "V" + bottom + "H" + (area.left + area.width), stroke: SOFT, fill: "none" }, axes);
    write(axes, area.left + area.width / 2, bottom + 33, spec.x.title, { "text-anchor": "middle", fill: INK, "font-size": 12 });
    write(axes, 0, 0, spec.y.title, { "text-anchor": "middle", fill: INK, "font-size": 12, transform: "translate(12 " + (area.top + area.height / 2) + ") rotate(-90)" });
    var inside = svg("g", { "clip-path": "url(#" + this.id + ")" }, root);
    (spec.bands || []).forEach(function (band) {
      svg("rect", { "class": "band", x: chart.px(band[0]), y: area.top, width: chart.px(band[1]) - chart.px(band[0]), height: area.height, fill: "var(--band)" }, inside);
    });
    (spec.levels || []).forEach(function (level) {
      svg("path", { "class": "level", d: "M" + area.left + " " + chart.py(level) + "h" + area.width, stroke: "#999", "stroke-width": 0.8 }, inside);
    });
    if (heat) this.drawHeat(inside, root);
    else if (spec.violins) this.drawViolins(inside);
    else if (spec.bars) this.drawBars(inside);
    else this.shown().forEach(function (line) { chart.drawLine(inside, line); });
    this.cursor = svg("g", { "pointer-events": "none" }, root);
  };

  Chart.prototype.drawLine = function (parent, line) {
    var chart = this, log = this.spec.y.log, d = "", pen = "M", points = [];
    line.x.forEach(function (x, i) {
      var y = line.y[i];
      if (!known(y) || (log && y <= 0)) { pen = "M"; return; }
      var at = [chart.px(x), chart.py(y)];
      d += pen + at[0].toFixed(1) + " " + at[1].toFixed(1);
      pen = "L";
      points.push(at);
    });
    if (!line.dots) svg("path", { "class": "line", d: d, fill: "none", stroke: tint(line.look.color), "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": DASHES[line.look.dash] }, parent);
    var step = line.dots ? 1 : Math.max(1, Math.ceil(points.length / 16));
    points.forEach(function (at, i) { if (i % step === 0) mark(parent, line.look, at[0], at[1], line.dots ? 2 : 3.5); });
  };

  Chart.prototype.drawBars = function (parent) {
    var chart = this, shown = this.shown(), floor = this.py(0);
    var slot = 0.8 * Math.abs(this.px(1) - this.px(0)), width = slot / Math.max(1, shown.length);
    shown.forEach(function (line, k) {
      line.x.forEach(function (x, i) {
        if (!known(line.y[i])) return;
        var y = chart.py(line.y[i]), left = chart.px(x) - slot / 2 + k * width;
        svg("rect", { "class": "mark bar", x: left, y: Math.min(y, floor), width: Math.max(1, width), height: Math.max(1, Math.abs(floor - y)), fill: tint(line.look.color) }, parent);
        svg("path", { "class": "mark", d: symbol(line.look.symbol, left + width / 2, y, 2.5), fill: tint(line.look.color) }, parent);
      });
    });
  };

  Chart.prototype.drawViolins = function (parent) {
    var chart = this, found = this.spec.violins, names = this.shown().map(function (part) { return part.name; });
    var unit = this.px(1) - this.px(0), half = found.half * unit, small = unit < 14 ? 2 : 3;
    if (names.includes("distribution")) found.items.forEach(function (item) {
      var x = chart.px(item[0]);
      function side(sign) {
        return item[2].map(function (value, i) { return (x + sign * half * item[3][i] / 100).toFixed(1) + " " + chart.py(value).toFixed(1); });
      }
      svg("path", { "class": "violin", d: "M" + side(-1).join("L") + "L" + side(1).reverse().join("L") + "Z", fill: "rgba(0,114,178,0.28)", stroke: BLUE, "stroke-width": 0.7 }, parent);
    });
    MARKS.forEach(function (part, i) {
      var at = [4, 6, 5][i];
      if (names.includes(part.name)) found.items.forEach(function (item) {
        if (known(item[at])) mark(parent, part.look, chart.px(item[0]), chart.py(item[at]), small);
      });
    });
  };

  Chart.prototype.drawHeat = function (parent, root) {
    var heat = this.spec.heat, area = this.area, values = this.values;
    var canvas = document.createElement("canvas"), steps = CIVIDIS.length - 1;
    canvas.width = heat.columns;
    canvas.height = heat.rows;
    var context = canvas.getContext("2d"), image = context.createImageData(heat.columns, heat.rows);
    for (var i = 0; i < values.length; i++) {
      var row = Math.floor(i / heat.columns), up = heat.square ? row : heat.rows - 1 - row;
      var at = 4 * (up * heat.columns + i % heat.columns), place = values[i] / 65534 * steps, k = Math.min(Math.floor(place), steps - 1);
      if (values[i] === 65535) continue; // not measured: stays clear
      for (var c = 0; c < 3; c++) image.data[at + c] = CIVIDIS[k][c] + (place - k) * (CIVIDIS[k + 1][c] - CIVIDIS[k][c]);
      image.data[at + 3] = 255;
    }
    context.putImageData(image, 0, 0);
    svg("image", { "class": "heat", href: canvas.toDataURL(), x: area.left, y: area.top, width: area.width, height: area.height, preserveAspectRatio: "none", style: "image-rendering: pixelated" }, parent);
    var fade = svg("linearGradient", { id: this.id + "-scale", x1: 0, y1: 1, x2: 0, y2: 0 }, root);
    CIVIDIS.forEach(function (colour, i) { svg("stop", { offset: i / steps, "stop-color": "rgb(" + colour + ")" }, fade); });
    var x = area.left + area.width + 12;
    svg("rect", { x: x, y: area.top, width: 12, height: area.height, fill: "url(#" + this.id + "-scale)" }, root);
    [0, 0.5, 1].forEach(function (share) {
      write(root, x + 16, area.top + (1 - share) * (area.height - 8) + 8, number(Number((heat.low + share * (heat.top - heat.low)).toPrecision(3))));
    });
  };

  // the stops, places with a read-out, in order: {at: [x, y] or null for all heights, title, rows}
  Chart.prototype.stops = function () {
    if (this.spec.violins) return this.spec.violins.items.map(function (item) { return item[0]; });
    var all = {};
    this.shown().forEach(function (line) { line.x.forEach(function (x, i) { if (known(line.y[i])) all[x] = x; }); });
    return Object.keys(all).map(function (key) { return all[key]; }).sort(function (a, b) { return a - b; });
  };

  // the read-out at stop number i; y chooses among several dots
  Chart.prototype.readOut = function (i, y) {
    var spec = this.spec, chart = this;
    if (spec.heat) {
      var h = spec.heat, column = i % h.columns, row = Math.floor(i / h.columns), code = this.values[i];
      var words = code === 65535 ? "not measured" : number(Number((h.low + code / 65534 * (h.top - h.low)).toPrecision(4)));
      var x = h.x0 + h.dx * column, up = h.y0 + h.dy * row;
      return { x: x, title: h.names[0] + " " + Math.round(x) + ", " + h.names[1] + " " + Math.round(up), rows: [{ text: words, y: up }], cell: true };
    }
    if (spec.violins) {
      var item = spec.violins.items[i];
      return { x: item[0], title: item[1], rows: [["mode", 4], ["median", 5], ["mean", 6]].filter(function (m) { return known(item[m[1]]); }).map(function (m) {
        var part = MARKS.find(function (p) { return p.name === m[0]; });
        return { part: part, text: m[0] + " " + number(item[m[1]]), y: item[m[1]] };
      }) };
    }
    var at = this.stops()[i], rows = [];
    this.shown().forEach(function (line) {
      var best = -1;
      line.x.forEach(function (x, k) {
        if (x !== at || !known(line.y[k])) return;
        if (best < 0 || Math.abs(chart.py(line.y[k]) - y) < Math.abs(chart.py(line.y[best]) - y)) best = k;
      });
      if (best >= 0) rows.push({ part: line, text: (line.labels ? line.labels[best] : line.name) + " " + number(line.y[best]), y: line.y[best] });
    });
    return { x: at, title: (at === 0 ? "input of the first block" : "layer " + at), rows: rows };
  };

  Chart.prototype.hide = function () {
    this.hover = null;
    if (this.cursor) this.cursor.replaceChildren();
    if (tip) tip.hidden = true;
  };

  Chart.prototype.show = function (i, y) {
    var stop = this.readOut(i, y === undefined ? this.area.top : y), x = this.px(stop.x), chart = this;
    this.hide();
    if (!stop.rows.length || x < this.area.left - 1 || x > this.area.left + this.area.width + 1) return;
    this.hover = i;
    if (!stop.cell) svg("path", { d: "M" + x + " " + this.area.top + "v" + this.area.height, stroke: SOFT, "stroke-dasharray": "3 3" }, this.cursor);
    if (!tip) { tip = html("div", "tip", document.body); tip.setAttribute("role", "status"); }
    tip.replaceChildren();
    html("strong", "", tip, stop.title);
    stop.rows.forEach(function (row) {
      svg("circle", { cx: x, cy: chart.py(row.y), r: stop.cell ? 4 : 6, fill: "none", stroke: stop.cell ? "#D55E00" : INK, "stroke-width": 1.5, "clip-path": "url(#" + chart.id + ")" }, chart.cursor);
      var line = html("div", "", tip);
      if (row.part) sample(line, row.part);
      html("span", "", line, row.text);
    });
    tip.hidden = false;
    spot = [this, x, this.py(stop.rows[0].y)];
    place();
  };

  // the read-out beside its point, inside the window
  function place() {
    if (!tip || tip.hidden) return;
    var box = spot[0].plot.getBoundingClientRect(), size = tip.getBoundingClientRect(), edge = document.documentElement.clientWidth;
    var x = box.left + spot[1], left = x + 14 + size.width > edge - 4 ? x - 14 - size.width : x + 14;
    tip.style.left = Math.max(4, Math.min(left, edge - size.width - 4)) + "px";
    tip.style.top = Math.max(4, Math.min(box.top + spot[2] - size.height / 2, window.innerHeight - size.height - 4)) + "px";
  }

  // the stop nearest to a place in the drawing
  Chart.prototype.nearest = function (x, y) {
    var h = this.spec.heat;
    if (h) {
      var column = Math.round((this.xOf(x) - h.x0) / h.dx), row = Math.round((this.yOf(y) - h.y0) / h.dy);
      return column < 0 || row < 0 || column >= h.columns || row >= h.rows ? -1 : row * h.columns + column;
    }
    var at = this.xOf(x), best = -1, stops = this.stops();
    stops.forEach(function (stop, i) { if (best < 0 || Math.abs(stop - at) < Math.abs(stops[best] - at)) best = i; });
    return best;
  };

  Chart.prototype.zoom = function (view) {
    this.view = view;
    this.draw();
  };

  Chart.prototype.listen = function () {
    var chart = this, plot = this.plot, from = null, frame = null;
    function place(event) {
      var box = plot.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    }
    function inside(at) {
      var a = chart.area;
      return [Math.min(Math.max(at[0], a.left), a.left + a.width), Math.min(Math.max(at[1], a.top), a.top + a.height)];
    }
    function read(event) {
      var at = place(event), a = chart.area;
      var out = at[0] < a.left - 12 || at[0] > a.left + a.width + 12 || at[1] < a.top - 8 || at[1] > a.top + a.height + 8;
      var i = out ? -1 : chart.nearest(at[0], at[1]);
      if (i < 0) chart.hide();
      else chart.show(i, at[1]);
    }
    plot.addEventListener("pointermove", function (event) {
      if (!from) { read(event); return; }
      var a = inside(from), b = inside(place(event));
      chart.hide();
      if (!frame) frame = svg("rect", { fill: "var(--band)", stroke: SOFT }, plot.firstChild);
      frame.setAttribute("x", Math.min(a[0], b[0]));
      frame.setAttribute("y", Math.min(a[1], b[1]));
      frame.setAttribute("width", Math.abs(a[0] - b[0]));
      frame.setAttribute("height", Math.abs(a[1] - b[1]));
    });
    plot.addEventListener("pointerdown", function (event) {
      if (event.pointerType === "mouse" && event.button === 0 && !chart.spec.heat) {
        from = place(event);
        plot.setPointerCapture(event.pointerId);
        event.preventDefault(); // no text is selected
      } else read(event);
    });
    function release(event) {
      if (!from) return;
      var a = inside(from), b = inside(place(event));
      from = null;
      if (frame) frame.remove();
      frame = null;
      if (event.type === "pointerup" && Math.abs(a[0] - b[0]) > 8 && Math.abs(a[1] - b[1]) > 8) {
        var x = [chart.xOf(a[0]), chart.xOf(b[0])], y = [chart.yOf(a[1]), chart.yOf(b[1])];
        chart.zoom([Math.min(x[0], x[1]), Math.max(x[0], x[1]), Math.min(y[0], y[1]), Math.max(y[0], y[1])]);
      }
    }
    plot.addEventListener("pointerup", release);
    plot.addEventListener("pointercancel", release);
    plot.addEventListener("dblclick", function () { chart.zoom(null); });
    plot.addEventListener("pointerleave", function (event) { if (event.pointerType === "mouse") chart.hide(); });
    plot.addEventListener("blur", function () { chart.hide(); });
    plot.addEventListener("keydown", function (event) {
      var h = chart.spec.heat, last = (h ? chart.values.length : chart.stops().length) - 1, row = h ? h.columns : 1;
      var down = h && h.square ? row : -row;
      var move = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: h ? -down : 0, ArrowDown: h ? down : 0 }[event.key];
      if (event.key === "Escape") chart.hide();
      if (!move) return;
      event.preventDefault();
      chart.show(chart.hover === null ? 0 : Math.min(Math.max(chart.hover + move, 0), last));
    });
  };

  window.addEventListener("scroll", place, { passive: true, capture: true });
  return Chart;
})();
