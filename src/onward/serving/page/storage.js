// The browser's storage for this page; a browser that refuses access stores nothing.

const tried = (does, otherwise) => {
  try {
    return does();
  } catch {
    return otherwise;
  }
};

export const read = (name) => tried(() => localStorage.getItem(name), null);
export const names = () => tried(() => Object.keys(localStorage), []);
export const forget = (name) => tried(() => localStorage.removeItem(name));

// Store a text; return whether this succeeded.
export const write = (name, text) => tried(() => (localStorage.setItem(name, text), true), false);

// The value of a JSON text; `otherwise` if the text is not JSON, or is null.
export const parsed = (text, otherwise = null) => tried(() => JSON.parse(text) ?? otherwise, otherwise);

// A text that is kept until the tab is closed.
export const readHere = (name) => tried(() => sessionStorage.getItem(name), null);
export const writeHere = (name, text) => tried(() => sessionStorage.setItem(name, text));
