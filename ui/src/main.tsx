import { render } from "preact";
import { App } from "./app";
import "./styles/base.css";
import "./styles/fields.css";
import "./styles/frame.css";
import "./styles/chips.css";
import "./styles/playground.css";
import "./styles/tables.css";
import "./styles/charts.css";
import "./styles/dialogs.css";
import "./styles/narrow.css";

const root = document.getElementById("app");
if (root !== null) render(<App />, root);
