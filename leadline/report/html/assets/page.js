(function () {
  "use strict";
  var specs = JSON.parse(document.getElementById("chart-data").textContent);
  var tabs = Array.from(document.querySelectorAll("[role=tab]"));
  var panels = tabs.map(function (tab) { return document.getElementById(tab.getAttribute("aria-controls")); });
  var boxes = Array.from(document.querySelectorAll(".chart"));
  var charts = new Map(); // those drawn so far, by their box
  var PRINT_WIDTH = 670, PRINT_HEIGHT = 220;

  function draw(box) {
    if (!charts.has(box)) charts.set(box, new DepthChart(box, specs[Number(box.dataset.chart)], box.dataset.title));
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

  function redraw() { charts.forEach(function (chart) { chart.draw(); }); }
  var timer = 0;
  window.addEventListener("resize", function () {
    clearTimeout(timer);
    timer = setTimeout(redraw, 100);
  });
  window.addEventListener("beforeprint", function () {
    clearTimeout(timer);
    boxes.forEach(function (box) {
      draw(box);
      charts.get(box).draw(PRINT_WIDTH, PRINT_HEIGHT);
    });
  });
  window.addEventListener("afterprint", redraw);
})();
