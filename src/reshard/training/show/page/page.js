const main = document.querySelector('main'), controls = document.querySelector('.controls');
const kept = { get: name => { try { return sessionStorage.getItem(name); } catch { return null; } },
               set: (name, value) => { try { sessionStorage.setItem(name, value); } catch { /* not on this page */ } } };
if (controls) controls.hidden = false;
for (const box of document.querySelectorAll('.controls input')) {
  // A page that reloads itself while the run goes on keeps what was chosen.
  if (kept.get(box.name) !== null) box.checked = kept.get(box.name) === 'true';
  const apply = () => { main.classList.toggle(box.name, box.checked); kept.set(box.name, box.checked); };
  box.addEventListener('change', apply);
  apply();
}
for (const plot of document.querySelectorAll('.plot')) {
  const runs = JSON.parse(plot.dataset.points), cross = plot.querySelector('.cross'), told = plot.querySelector('.told');
  const hide = () => { cross.style.display = told.style.display = 'none'; };
  plot.addEventListener('pointerleave', hide);
  plot.addEventListener('pointermove', event => {
    const box = plot.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * 100;
    const near = runs.map(points => points.length &&
      points.reduce((a, b) => Math.abs(b[1] - x) < Math.abs(a[1] - x) ? b : a));
    const first = near.filter(Boolean).sort((a, b) => Math.abs(a[1] - x) - Math.abs(b[1] - x))[0];
    if (!first) return;
    cross.style.left = first[1] + '%';
    told.replaceChildren(...near.flatMap((point, index) => point ? [Object.assign(document.createElement('div'), {
      textContent: (names.length ? names[index] + ', ' : '') + 'step ' + point[0] + ': ' + Number(point[2].toPrecision(5)) })] : []));
    told.style.left = first[1] > 50 ? 'auto' : 'calc(' + first[1] + '% + 8px)';
    told.style.right = first[1] > 50 ? 'calc(' + (100 - first[1]) + '% + 8px)' : 'auto';
    cross.style.display = told.style.display = 'block';
  });
}
const when = document.querySelector('.when');
if (when && document.querySelector('meta[http-equiv]')) {
  const tell = () => {
    const age = Math.round(Date.now() / 1000 - when.dataset.time);
    if (age > 60) when.textContent = 'last update ' + Math.round(age / 60) + ' min ago';
  };
  tell(); setInterval(tell, 1000);
}
