(function () {
  "use strict";
  var charts = JSON.parse(document.getElementById("chart-data").textContent);
  var tabs = Array.from(document.querySelectorAll("[role=tab]"));
  var panels = tabs.map(function (tab) { return document.getElementById(tab.getAttribute("aria-controls")); });
  var boxes = Array.from(document.querySelectorAll(".chart"));
  var touch = window.matchMedia("(pointer: coarse)");
  var PRINT_WIDTH = 670;

  function draw(box) {
    if (box.classList.contains("js-plotly-plot")) return;
    var spec = charts[Number(box.dataset.chart)];
    var narrow = box.clientWidth < 560;
    var bar = spec.data[0].type === "heatmap"; // its colour bar stands where the buttons of other charts are
    var layout = Object.assign({
      autosize: true,
      font: { size: narrow ? 11 : 12, color: "#1a1a1a" },
      margin: { l: narrow ? 60 : 72, r: touch.matches || bar ? 12 : 36, t: bar && !touch.matches ? 30 : 12, b: 46 },
      hovermode: narrow ? "closest" : "x unified",
      dragmode: touch.matches ? false : "zoom",
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      modebar: { orientation: bar ? "h" : "v", bgcolor: "rgba(255,255,255,0)" },
      showlegend: spec.data.length > 1,
    }, spec.layout);
    Object.assign(layout.xaxis, { zeroline: false, gridcolor: "#e6e6e6" });
    Object.assign(layout.yaxis, { zeroline: false, gridcolor: "#e6e6e6" });
    if (layout.hovermode === "closest") {
      spec.data.forEach(function (trace) {
        if (trace.hovertemplate === "%{y:.5~g}") trace.hovertemplate = "layer %{x}: %{y:.5~g}";
      });
    }
    Plotly.newPlot(box, spec.data, layout, {
      displaylogo: false,
      displayModeBar: touch.matches ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
      plotlyServerURL: "",
      toImageButtonOptions: { format: "svg", filename: "depth" },
    });
  }

  function show(chosen, focus) {
    tabs.forEach(function (tab, i) {
      var on = i === chosen;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
      panels[i].classList.toggle("on", on);
    });
    panels[chosen].querySelectorAll(".chart").forEach(draw);
    if (focus) tabs[chosen].focus();
  }

  tabs.forEach(function (tab, i) {
    tab.addEventListener("click", function () { show(i, false); });
    tab.addEventListener("keydown", function (event) {
      var to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      show((to + tabs.length) % tabs.length, true);
    });
  });
  show(0, false);

  // the other tabs are drawn one chart at a time while nothing else happens
  var waiting = boxes.slice();
  (function next() {
    var box = waiting.shift();
    if (!box) return;
    draw(box);
    setTimeout(next, 0);
  })();

  // plotly.js could follow the size of its box by itself, but then it redraws in the middle of printing
  function fit(box, size) {
    Plotly.relayout(box, size);
    Plotly.relayout(box, size); // a legend that now takes fewer lines finds its place in the second pass
  }
  function fill() {
    boxes.forEach(function (box) {
      if (box.classList.contains("js-plotly-plot")) fit(box, { width: null, height: null, autosize: true });
    });
  }
  var timer = 0;
  window.addEventListener("resize", function () {
    clearTimeout(timer);
    timer = setTimeout(fill, 100);
  });
  window.addEventListener("beforeprint", function () {
    clearTimeout(timer);
    boxes.forEach(function (box) {
      draw(box);
      fit(box, { width: PRINT_WIDTH, height: 250 });
    });
  });
  window.addEventListener("afterprint", fill);
})();
