// Appended to the theme's search worker: results whose title equals the query come first, glossary terms before
// others. A term has an item for each of its names, and is listed and counted once, under the name that fits the query
// best. The theme's worker therefore finds all results at once, and this script divides them into pages.
{
  const size = 10; // of a page
  const plain = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, " ").trim();
  const post = self.postMessage.bind(self), read = self.onmessage;
  let items = [], result; // the reply to the current query, with all results
  self.postMessage = (message) => (message.type === 3 ? (result = message.data) : post(message));
  const find = (data) => {
    const query = plain(data.input), ask = (page) => read({ data: { type: 2, data: { ...data, page } } });
    result = undefined;
    ask(); // replies before it returns, with the first page
    if (!result) return; // the theme reports the error
    const { items: before, pagination: { next, total } } = result;
    if (next) {
      ask({ ...next, size: total }); // only the rest: the highlights of an item that is asked for again are wrong
      result.items = [...before, ...result.items];
    }
    const rank = ({ id }) => (items[id][0] === query ? items[id][1] : 0);
    const listed = new Set(), first = ({ id }) => !listed.has(items[id][2]) && listed.add(items[id][2]);
    result.items = result.items.sort((one, other) => rank(other) - rank(one)).filter(first);
  };
  self.onmessage = (event) => {
    const { type, data } = event.data;
    if (type === 0) items = data.items.map(({ title, location }) => [plain(title), location.startsWith("glossary") ? 2 : 1, location]);
    if (type !== 2) return read(event);
    if (!data.page) find(data);
    if (!result) return;
    const from = data.page?.from ?? 0, total = result.items.length;
    const page = (from) => (from >= 0 && from < total ? { size, from } : undefined);
    const pagination = { total, prev: page(from - size), next: page(from + size) };
    post({ type: 3, data: { ...result, items: result.items.slice(from, from + size), pagination } });
  };
}
