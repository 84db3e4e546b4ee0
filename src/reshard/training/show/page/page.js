const main = document.querySelector('main'), controls = document.querySelector('.controls');
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const chosen = name => main.classList.contains(name);
const kept = { get: name => { try { return sessionStorage.getItem(name); } catch { return null; } },
               set: (name, value) => { try { sessionStorage.setItem(name, value); } catch { /* not on this page */ } } };
// The lines of one run: its points, their means over them, and evaluations as dots.
function lines(run, index, log) {
  const color = style('--r' + index % 8), smooth = chosen('smooth') && run.means.length;
  const name = names.length ? names[index] + ', ' : '';
  const line = (label, points, width, more) => ({
    type: 'line', name: name + label, color, symbol: 'circle', symbolSize: 5, showSymbol: points.length < 3,
    data: log ? points.map(([step, value]) => [step, value > 0 ? value : null]) : points,
    lineStyle: { width, type: index < 8 ? 'solid' : 'dotted' }, emphasis: { disabled: true }, ...more });
  return [
    line('', run.points, smooth ? 1 : 1.6, smooth ? { itemStyle: { opacity: .3 }, lineStyle: { width: 1, opacity: .3 } } : {}),
    ...(smooth ? [line('mean ', run.means, 2.2, { tooltip: { show: false } })] : []),
    ...(run.beside.length ? [line('evaluation ', run.beside, 1.6, {
      color: names.length ? color : style('--other'), showSymbol: true, symbolSize: 7, lineStyle: { type: 'dashed' } })] : []),
  ];
}
function options(chart) {
  const log = chosen('logarithmic') && chart.positive, quiet = style('--dim'), number = value => +value.toPrecision(5);
  const told = found => found.filter(each => each.value[1] !== null && !each.seriesName.includes('mean ')).map(each =>
    echarts.format.encodeHTML(each.seriesId === 'broken' ? `step ${each.value[0]}: not a finite number`
      : `${each.seriesName}step ${each.value[0]}: ${number(each.value[1])}`)).join('<br>');
  const axis = { axisLabel: { color: quiet }, axisLine: { show: false }, splitLine: { lineStyle: { color: style('--line') } } };
  const broken = { id: 'broken', type: 'line', yAxisIndex: 1, data: chart.broken.map(step => [step, 1]), color: style('--bad'),
                   symbol: 'triangle', symbolRotate: 180, symbolSize: 8, showSymbol: true, lineStyle: { opacity: 0 } };
  return {
    animation: false, textStyle: { fontFamily: 'inherit' },
    grid: { left: 8, right: 12, top: 10, bottom: 4, outerBoundsMode: 'same', outerBoundsContain: 'axisLabel' },
    xAxis: { ...axis, type: 'value', min: 'dataMin', max: 'dataMax', minInterval: 1, splitLine: { show: false } },
    yAxis: [{ ...axis, type: log ? 'log' : 'value', scale: true }, { show: false, min: 0, max: 1 }],
    tooltip: { trigger: 'axis', confine: true, formatter: told, backgroundColor: style('--bg'), borderColor: style('--line'),
               textStyle: { color: style('--fg'), fontSize: 12 } },
    series: [...chart.runs.flatMap((run, index) => lines(run, index, log)), broken],
  };
}
function draw() {
  for (const place of document.querySelectorAll('.plot')) {
    if (!place.clientWidth) continue;  // folded
    echarts.getInstanceByDom(place)?.dispose();
    echarts.init(place, null, { renderer: 'svg' }).setOption(options(JSON.parse(place.dataset.chart)));
  }
}
if (controls) controls.hidden = false;
for (const box of document.querySelectorAll('.controls input')) {
  // A page that reloads itself while the run goes on keeps what was chosen.
  if (kept.get(box.name) !== null) box.checked = kept.get(box.name) === 'true';
  const apply = () => { main.classList.toggle(box.name, box.checked); kept.set(box.name, box.checked); };
  box.addEventListener('change', () => { apply(); draw(); });
  apply();
}
draw();
let waiting;
addEventListener('resize', () => { clearTimeout(waiting); waiting = setTimeout(draw, 150); });
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
for (const folded of document.querySelectorAll('details')) folded.addEventListener('toggle', draw);
const when = document.querySelector('.when');
if (when && document.querySelector('meta[http-equiv]')) {
  const tell = () => {
    const age = Math.round(Date.now() / 1000 - when.dataset.time);
    if (age > 60) when.textContent = 'last update ' + Math.round(age / 60) + ' min ago';
  };
  tell(); setInterval(tell, 1000);
}
