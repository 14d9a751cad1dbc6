// Every page works without this script. It sends only the data of the page's own forms.
(() => {
  const find = (selector) => document.querySelector(selector);
  const lang = document.documentElement.lang;

  // Show times in the reader's time zone.
  const shown = { date: { dateStyle: 'long', timeStyle: 'short' }, time: { timeStyle: 'short' } };
  const localise = (element) => {
    element.textContent = new Intl.DateTimeFormat(lang, shown[element.dataset.local]).format(new Date(element.dateTime));
  };
  document.querySelectorAll('time[data-local]').forEach(localise);

  const pay = find('#pay');
  if (pay) {
    const button = pay.querySelector('button');
    const label = button.textContent;
    const busy = (is) => {
      button.disabled = is;
      button.textContent = is ? pay.dataset.paying : label;
    };
    // Disable the button after the form was sent. The server also refuses the second of two clicks.
    pay.addEventListener('submit', () => setTimeout(busy, 0, true));
    addEventListener('pageshow', () => busy(false));

    const number = find('#card_number');
    const brand = number.parentElement.querySelector('.brand');
    const brands = [[/^4/, 'Visa'], [/^(5[1-5]|2[2-7])/, 'Mastercard'], [/^3[47]/, 'Amex'], [/^(6011|64[4-9]|65)/, 'Discover'], [/^35/, 'JCB'], [/^(30[0-5]|36|3[89])/, 'Diners'], [/^(62|81)/, 'UnionPay']]; // prettier-ignore
    const group = (input, format) => input.addEventListener('input', () => input.selectionEnd === input.value.length && (input.value = format(input.value.replace(/\D/g, '')))); // prettier-ignore
    group(number, (digits) => {
      brand.textContent = (brands.find(([begins]) => begins.test(digits)) || [])[1] || '';
      return (/^3[47]/.test(digits) ? digits.replace(/^(\d{4})(\d{1,6})(\d*)$/, '$1 $2 $3') : digits.replace(/(\d{4})(?=\d)/g, '$1 ')).trim();
    });
    group(find('#expiry'), (digits) => digits.replace(/^(\d\d)(\d+)$/, '$1/$2'));
  }

  // Warn the payer five minutes before the session ends. Extend the session without loading the page, so that typed text is kept.
  const time = find('#time');
  if (time) {
    const moment = time.querySelector('time');
    const remind = () => {
      const left = Date.parse(moment.dateTime) - Date.now();
      time.classList.toggle('soon', left < 5 * 60000);
      setTimeout(remind, Math.max(1000, Math.min(left - 5 * 60000, 60000)));
    };
    remind();
    time.addEventListener('submit', (event) => {
      event.preventDefault();
      fetch(time.action, { method: 'POST', body: new URLSearchParams(new FormData(time)), headers: { accept: 'application/json' } })
        .then((answer) => (answer.ok ? answer.json() : Promise.reject()))
        .then(({ expiresAt }) => {
          moment.dateTime = expiresAt;
          localise(moment);
          remind();
        })
        .catch(() => location.reload());
    });
  }

  // While the bank has not answered, ask the server again. Reload the page only if its state changed.
  const { stage } = document.body.dataset;
  if (stage) {
    const look = () =>
      fetch(location.href, { redirect: 'manual' })
        .then((answer) => (answer.headers.get('checkout-stage') === stage ? setTimeout(look, 3000) : location.reload()))
        .catch(() => setTimeout(look, 3000));
    setTimeout(look, 3000);
  }

  const print = find('#print');
  if (print) {
    print.hidden = false;
    print.addEventListener('click', () => window.print());
  }
})();
