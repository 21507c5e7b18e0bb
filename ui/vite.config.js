import { defineConfig } from "vite";

// Relative addresses: a proxy may serve the page below a path.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../loramux/server/ui",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    cssCodeSplit: false,
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
  },
  server: {
    proxy: { "/v1": "http://127.0.0.1:8000", "/health": "http://127.0.0.1:8000" },
  },
});
